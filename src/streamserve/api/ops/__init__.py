"""Routes for operators: health, metrics, models, administration, API description."""
