"""Between the user's call and a plan: Dynamo, and what a compiled callable does."""
