"""Where the bytes of layers lie, and how they come to the device."""
