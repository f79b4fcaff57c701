"""Capture: run a model over prompts and yield finished streams. The only part of moetap that
imports MLX.
"""
