"""Measuring: times, memory, floors, and a process for every variant."""
