"""The HTTP interface of a model, as OpenAI's clients speak it, with states as resources; and a page to talk with it."""
