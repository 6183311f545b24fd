//! Hidden states are handed to a proposer that wants them: those of PyTorch, of the tokens that were right and no others, whatever was
//! guessed in between.

mod common;

use std::sync::{Arc, Mutex};

use baton_core::{SeqId, TokenId};
use baton_engine::{DraftRequest, Guess, Owner, Proposer};
use common::{Golden, assert_idle, engine, golden, greedy, reference, small_config};

/// What the head was handed: the position of the first row, and the rows.
type Handed = Arc<Mutex<Vec<(usize, Vec<f32>)>>>;

/// Stands for a head that goes on from hidden states. It guesses what the golden answer has, and every third time something else
/// from the second guess on.
#[derive(Debug)]
struct Head {
    answer: Vec<TokenId>,
    hidden_size: usize,
    handed: Handed,
}

impl Proposer for Head {
    fn propose(&mut self, request: &DraftRequest<'_>) -> Guess {
        assert!(!request.hidden.is_empty() && request.hidden.len().is_multiple_of(self.hidden_size));
        let num_rows = request.hidden.len() / self.hidden_size;
        // The newest token has no row.
        let first = request.token_ids.len() - 1 - num_rows;
        self.handed.lock().expect("no panic").push((first, request.hidden.to_vec()));
        let mut guess = Guess::default();
        let len = request.token_ids.len();
        for (place, &token_id) in self.answer.iter().skip(len).take(request.most).enumerate() {
            let is_wrong = len.is_multiple_of(3) && place > 0;
            guess.push(if is_wrong { (token_id + 1) % 100 } else { token_id }, 1.0);
        }
        guess
    }

    fn wants_hidden(&self) -> bool {
        true
    }

    fn ended(&mut self, _: SeqId, _: &[TokenId], _: &Owner) {}
}

fn golden_rows() -> (Vec<TokenId>, usize, Vec<Vec<f32>>) {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("data/hidden_rows.json")).expect("JSON");
    let read = |name: &str| golden[name].clone();
    let tokens = serde_json::from_value(read("tokens")).expect("token ids");
    let num_prompt_tokens = serde_json::from_value(read("num_prompt_tokens")).expect("a number");
    (tokens, num_prompt_tokens, serde_json::from_value(read("rows")).expect("rows"))
}

#[test]
fn a_head_gets_the_hidden_states_of_what_was_right() {
    let (answer, num_prompt_tokens, rows) = golden_rows();
    let golden: Golden = golden("llama");
    let mut engine = engine(&golden, reference(), &small_config(&golden));
    let handed = Handed::default();
    let head = Head { answer: answer.clone(), hidden_size: rows[0].len(), handed: Arc::clone(&handed) };
    engine.set_proposer(Box::new(head), 3);
    let prompt = answer[..num_prompt_tokens].to_vec();
    let num_new = answer.len() - num_prompt_tokens;
    let output = engine.generate(vec![prompt], &greedy(num_new as u32)).expect("completes").remove(0);
    assert_eq!(output.outputs[0].token_ids, answer[num_prompt_tokens..]);
    assert!(output.drafts.num_accepted > 4 && output.drafts.num_rejected > 1, "{:?}", output.drafts);
    assert_idle(&engine);
    // Row by row, nothing left out and nothing twice.
    let mut next = num_prompt_tokens - 1;
    for (first, got) in handed.lock().expect("no panic").iter() {
        assert_eq!(*first, next);
        for (row, want) in got.chunks(rows[0].len()).zip(&rows[next..]) {
            for (got, want) in row.iter().zip(want) {
                assert!((got - want).abs() <= 1e-4 * want.abs().max(1.0), "row {next}: {got} and {want}");
            }
            next += 1;
        }
    }
    assert!(next + 5 >= answer.len() && next > num_prompt_tokens + 4, "{next} of {}", answer.len());
}
