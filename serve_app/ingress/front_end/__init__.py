"""The front end builds vLLM's own OpenAI front end for each model, and checks grammars before an engine gets them."""
