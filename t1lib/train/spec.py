"""Moved to `t1lib.optimizers`."""

from t1lib.optimizers import *  # noqa: F403
