"""The HTTP endpoint: Ollama, OpenAI and Anthropic routes."""
