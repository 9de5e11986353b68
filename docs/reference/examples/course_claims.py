from clearhead.course import claims


(outcome,) = claims.run(["scale-key-weight"])  # an Outcome of a Claim, run in an Experiment
outcome.verdict  # → 'does not hold'

len(claims.claims()) > 100  # → True

claims.find(["scale-key-weight"])[0].location  # → '1.1g, summary'

page = claims.report(claims.run(["scale-key-weight"]))

claims.ledger_of("ceng403-exam").to_dict()["unaccounted"]  # → 0
len(claims.coverage())  # → 5

claims.ClaimError  # names the nearest claim where one does not exist
