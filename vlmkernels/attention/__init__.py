"""Attention over packed segments, and the same straight from a vision tower's projection.

api.py        the public functions; read this first
select.py     which kernel serves a call, one pure function
launch.py     the two torch ops: checks, workspace, the native call, gradients
reference.py  what the functions mean, in plain torch
"""
