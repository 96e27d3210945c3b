"""Models of the Hugging Face hub: their names, which of their files are loaded, downloads, and the cache."""
