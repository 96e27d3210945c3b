"""Names of settings that people bring from vLLM, SGLang, llama.cpp and Ollama, and what they mean here."""
