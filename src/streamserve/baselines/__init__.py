"""Published policies that the product's own are compared with, by name."""
