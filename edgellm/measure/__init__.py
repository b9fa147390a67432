"""What `edgellm bench` and `edgellm perplexity` compute."""
