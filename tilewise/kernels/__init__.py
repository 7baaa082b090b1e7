"""Device code. Imported by the backends that launch it, when they launch it, and by nothing else."""
