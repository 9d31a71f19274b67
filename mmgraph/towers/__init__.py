"""Vision and audio towers: what the host prepares for them, and how it gets to the device.

Nothing is imported here, so that a part costs what it needs alone.
"""
