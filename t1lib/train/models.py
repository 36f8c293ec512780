"""Moved to `t1lib.models`."""

from t1lib.models import *  # noqa: F403
