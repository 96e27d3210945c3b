"""The packaged model: quality, formats, installation, start of workers."""
