"""Training of EAGLE-3 drafts."""

from eaglejax.training.gradients import LossAndGrads, ttt_loss_and_grads

__all__ = ["LossAndGrads", "ttt_loss_and_grads"]
