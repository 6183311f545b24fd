//! Limits for work that the grammar engine does on its own and does not limit.
//!
//! To build a lexer it takes one step from the start state for each of the 256 bytes, and checks each time whether anything can
//! still match. That check is an unbounded search: for `multipleOf` of two billion it visits as many states. So the same
//! steps are taken here first, with a limit; what passes here is cheap there too.

use llguidance::ParserFactory;
use llguidance::earley::lexerspec::LexerSpec;

/// Takes the lexer's first steps within the limits of the factory, or says that they are not enough.
pub(crate) fn check_lexer(spec: &LexerSpec, factory: &ParserFactory) -> Result<(), String> {
    let mut limits = factory.limits().clone();
    let mut spec = spec.clone();
    spec.add_extra_lexemes(&factory.extra_lexemes());
    let mut lexer = spec.to_regex_vec(&mut limits).map_err(|error| error.to_string())?;
    lexer.set_fuel(limits.initial_lexer_fuel);
    lexer.set_max_states(limits.max_lexer_states);
    let first = lexer.initial_state(&spec.all_lexemes());
    for byte in 0..=u8::MAX {
        lexer.transition(first, byte);
        if lexer.has_error() {
            return Err("fuel exhausted when the lexer was begun".to_owned());
        }
    }
    Ok(())
}
