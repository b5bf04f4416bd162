"""The layer in graphs: torch.compile, torch.export and other tracers."""
