"""Several devices: the mesh, what is split over it and how, and what that costs."""
