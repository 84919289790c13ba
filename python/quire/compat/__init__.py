"""Other packages' names."""
