//! Rows of a module, whole or cut by inputs.

use linear::{Rounding, StoredRow, StoredRows};

use super::Module;

impl StoredRows for Module<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let row = self.pick.row(row);
        let Some((first, _)) = self.pick.inputs else { return self.source.read(row, out) };
        let mut whole = StoredRow::new(&self.format, self.shape[1]);
        self.source.read(row, &mut whole);
        out.copy_cut(&self.format, &whole, first);
    }
}

impl Module<'_> {
    /// Inputs at whose multiples its rows can be cut ([`Form::grain`](crate::decoder::Form::grain)).
    pub fn grain(&self) -> usize {
        let (k, grain) = (self.shape[1], self.format.grain(self.shape[1]));
        match self.rounding {
            _ if self.order.is_some() => 0,
            // A scale of the whole row.
            Rounding::Row => 0,
            Rounding::Floats(width) if width >= k || !grain.max(width).is_multiple_of(grain.min(width).max(1)) => 0,
            Rounding::Floats(width) => grain.max(width),
            Rounding::None | Rounding::Blocks | Rounding::Static(_) => grain,
        }
    }

    /// Leaves rows whose inputs are cut elsewhere to [`Module::numbers`].
    pub(super) fn checked(mut self, inputs: usize) -> Self {
        let grain = self.grain();
        let ends = |(first, all): (usize, usize)| [first, if first + inputs == all { 0 } else { first + inputs }];
        self.in_rows &= self.pick.inputs.is_none_or(|cut| grain > 0 && ends(cut).iter().all(|end| end % grain == 0));
        self
    }
}
