"""Prompts for an audit where the user gives none: short, and such that answers repeat themselves here and there."""

PROMPTS = (
    "Write a Python function that counts how often each word occurs in a list of words, and three tests for it.",
    "Explain in simple words how a bicycle stays upright, and then say the same in one sentence.",
    "List ten animals that live in the sea, each with one fact about it.",
    "Rewrite this in the past tense: The river rises in spring, the fields fill with water, and the farmers wait.",
    "Write a short letter to a landlord about a broken heater, polite but firm.",
    "A train leaves at 9:40 and travels 210 km at 70 km/h. When does it arrive? Show every step.",
    "Translate into French: Good morning, I would like two coffees and the bill, please.",
    "Write a table in Markdown of five European capitals with country, river and population.",
    "Summarize: The council met on Monday. It agreed to plant 400 trees along the main roads before winter, to close"
    " two car parks, and to ask residents which streets should come first.",
    "Continue the story: The lighthouse keeper counted the steps every evening, and every evening there were 112.",
    "Write a SQL query that finds the three customers with the largest total of orders, and explain each line.",
    "What is the difference between weather and climate? Give three examples of each.",
)
