//! A compiled grammar and a limit of the reasoning as constraints of the sampler.

use sampling::{Constraint, ConstraintError, Mask, TokenSet};
use text::{GrammarError, Matcher, ThinkingBudget};

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

/// The state of one sequence whose reasoning is limited, and that of its grammar if it has one.
pub(crate) struct ThinkingConstraint {
    pub budget: ThinkingBudget,
    pub grammar: Option<Box<dyn Constraint>>,
    /// Number of tokens that the model can draw.
    pub vocab_size: usize,
}

impl Constraint for ThinkingConstraint {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let mask = match &mut self.grammar {
            Some(grammar) => grammar.mask()?,
            None => {
                let all = vec![u32::MAX; self.vocab_size.div_ceil(32)];
                Mask { tokens: TokenSet::from_words(all, self.vocab_size), may_end: true }
            }
        };
        let Some(token) = self.budget.forced().filter(|token| mask.tokens.contains(*token)) else { return Ok(mask) };
        let mut tokens = TokenSet::new(mask.tokens.size());
        tokens.insert(token);
        Ok(Mask { tokens, may_end: false })
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.budget.accept(token);
        self.grammar.as_mut().map_or(Ok(()), |grammar| grammar.accept(token))
    }

    fn is_complete(&self) -> bool {
        self.grammar.as_ref().is_some_and(|grammar| grammar.is_complete())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        let ThinkingConstraint { budget, grammar, vocab_size } = self;
        let grammar = grammar.as_ref().map(|grammar| grammar.fork());
        Box::new(ThinkingConstraint { budget: budget.clone(), grammar, vocab_size: *vocab_size })
    }
}

fn failed(GrammarError(problem): GrammarError) -> ConstraintError {
    ConstraintError(problem)
}
