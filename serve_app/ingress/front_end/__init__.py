"""The front end builds vLLM's own OpenAI front end for each model, and tries grammars before an engine gets them."""
