"""From kernel text to a function. A file imports only files above it:

source            the text of a kernel, with its includes and constants
hiprtc compiler   text to function, on an AMD GPU and on any
"""
