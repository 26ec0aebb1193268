"""The round loop and its phases: propose, verify, accept, commit.

Glossary; the code uses these words and no others:

- target, `target_model`: the model whose distribution is preserved.
- draft, `draft_model`: the model that proposes.
- `num_draft_tokens`, K in comments: tokens proposed for each row in one round.
- round: one propose, verify, accept, commit.
- draft step: one forward of the draft inside a round.
- propose, `Proposal`: run the draft K steps.
- verify, `Verification`: one target forward over K+1 positions.
- accept, `Acceptance`: decide the accepted prefix and the next token.
- commit: append tokens to the output and take both caches back to what was kept.
- accepted tokens, `num_accepted`: the accepted prefix of the draft, 0..K, the next token not counted.
- emitted tokens: accepted + 1, before cutting at end of sequence or length, 1..K+1.
- committed tokens: what stays in the output after the cut.
- bonus token: sampled from the target, only after all K draft tokens were accepted.
- correction token: sampled from the residual distribution after a rejection.
- next token: the bonus or the correction token, when it does not matter which.
- residual distribution, `residual_probs`: max(0, target - draft), renormalised.
- acceptance probability: min(1, target / draft) at the drafted token.
- `draft_probs`, `target_probs`: after all processors and softmax, in float32.
- lane: a way to run a model on just the tokens that its cache lacks. Ragged: own cache, a length per row. Compatible:
  the host's cache, all rows at one column.
- replay: reading committed tokens again after a recurrent state was put back to its snapshot.
- lossless: the output's law is the target's law; without sampling, the same tokens.
- pairing, `DraftPairing`: a published record of target, draft and settings.
- controller, `DraftLengthController`: chooses K for the next round.
- plain step: a round with K = 0, which is plain decoding.
- catch up: the draft reads committed tokens that it did not draft itself, the prompt included.
- probe: the draft judges the tokens of the latest plain steps, to see what drafting would have given.
- survival, S_j: the probability that at least the first j draft tokens are accepted.
- cost ratio: time of a draft step / time of a target forward.

Shapes: B rows, K draft tokens, V vocabulary, L committed length, T tokens emitted this round; always in the order
`[B, K+1, V]`, batch first even if B is 1.
"""
