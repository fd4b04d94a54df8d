"""The models in Hugging Face transformers: config, cache, model classes."""
