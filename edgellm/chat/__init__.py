"""Chat templates, tool-call and reasoning parsers, grammars."""
