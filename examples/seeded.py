"""The same seed gives the same text: alone, or among many other requests. Usage: python examples/seeded.py"""

from streamserve import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=24)
    with LLM("embedded", dtype="float32") as llm:
        prompt = llm.render([{"role": "user", "content": "Tell me about the sea."}])
        alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text
        others = [SamplingParams(temperature=1.0, seed=seed, max_tokens=24) for seed in range(15)]
        among = llm.generate([prompt] * 16, [*others, params], use_tqdm=False)[-1].outputs[0].text
    print(f"alone:         {alone!r}\namong sixteen: {among!r}\nequal:         {alone == among}")


if __name__ == "__main__":
    main()
