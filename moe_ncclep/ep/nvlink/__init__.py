"""Own kernels for ranks that reach each other's memory: symmetric buffers, their layout, and the launches."""
