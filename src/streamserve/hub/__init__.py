"""Models of the Hugging Face hub: names, the choice of files to load, downloads and the local cache."""
