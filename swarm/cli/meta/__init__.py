"""Commands about this installation, which start nothing.

``show`` prints the settings and where each one comes from, ``completion`` the scripts for shells. ``packages`` checks
for missing packages, for commands that need them.
"""
