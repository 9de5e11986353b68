from clearhead.course import proofs


proof = proofs.prove("weights-sum-to-one")  # a Proof; each part, a ProofPart, contains chains of ProofLine
proof.n_steps  # → 5
proof.parts[0].chains[0][1][-1].reason  # → 'Z > 0, because every exponential is positive'

list(proofs.bundled_proofs())[-1]  # → 'weights-sum-to-one'

page = proofs.html(proofs.prove("matrix-form"))
document = proofs.to_dict(proofs.prove("matrix-form"))
print(proofs.terminal(proofs.prove("matrix-form"), 72))
text = proofs.markdown(proofs.prove("matrix-form"), level=2) + proofs.latex(proofs.prove("matrix-form"))

source = """
title = "Twice"
statement = "A sum of equal terms."
sizes = ["n"]
[[part]]
start = "sum(j, n, 2)"
[[part.step]]
equals = "2 * n"
"""
proofs.verify(source).n_steps  # → 1
proofs.verification(proofs.verify(source))  # → 'The step was verified in letters, for any size.'

proofs.ProofError  # raised for a text that is not an expression; a step that does not hold raises ProblemError
