//! A compiled grammar as a constraint of the sampler.

use sampling::{Constraint, ConstraintError, Mask, TokenSet};
use text::{GrammarError, Matcher};

/// The state of one sequence in a grammar, for [`Engine::submit_constrained`](crate::Engine::submit_constrained).
pub struct GrammarConstraint(pub Matcher);

impl Constraint for GrammarConstraint {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let text::Mask { words, may_end } = self.0.mask().map_err(failed)?;
        Ok(Mask { tokens: TokenSet::from_words(words, self.0.vocab_size()), may_end })
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.0.accept(token).map_err(failed)
    }

    fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(GrammarConstraint(self.0.clone()))
    }
}

fn failed(GrammarError(problem): GrammarError) -> ConstraintError {
    ConstraintError(problem)
}
