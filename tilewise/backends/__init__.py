"""Ways to compute attention; each one is `unsupported`, `forward`, `backward`."""
