"""Routes for operators: health, metrics, models, administration, the API's description."""
