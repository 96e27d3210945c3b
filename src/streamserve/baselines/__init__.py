"""Published policies, by name, with which this product's policies are compared."""
