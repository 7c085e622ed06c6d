"""Instruments that tell whether speculation pays, and why."""
