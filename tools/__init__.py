"""What makes the README's tables, the models' cards, the cost model's constants and a study, and the campaign that
looks for what breaks. All of it needs a checkout, so none of it is part of the package."""
