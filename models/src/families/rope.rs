//! The rotary embedding, from `rope_scaling` (older checkpoints) or `rope_parameters` (newer ones).

use super::sizes::{self, MAX_HEAD_DIM, not_negative, positive};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::{Rope, RopeScaling};

/// Keys of a family's rotary embedding and the values of absent ones.
#[derive(Clone, Copy)]
pub(super) struct RopeDefaults {
    /// Key of the base beside the object of parameters, and the base if it is absent.
    pub theta: (&'static str, f64),
    /// Key of the share of a head that is rotated, and the share if it is absent.
    pub partial: (&'static str, f64),
    /// For families that state the number of rotated elements instead of a share: its key, and the number if it is absent.
    pub dims: Option<(&'static str, usize)>,
    /// Whether pairs are neighbours.
    pub interleaved: bool,
}

impl RopeDefaults {
    pub const LLAMA: RopeDefaults = RopeDefaults {
        theta: ("rope_theta", 10_000.0),
        partial: ("partial_rotary_factor", 1.0),
        dims: None,
        interleaved: false,
    };

    /// Llama's, with another default of `rope_theta`.
    pub const fn theta(theta: f64) -> RopeDefaults {
        RopeDefaults { theta: ("rope_theta", theta), ..RopeDefaults::LLAMA }
    }
}

/// Reads either spelling. A `rope_theta` inside the object takes precedence over one beside it.
pub(super) fn read(
    fields: &Fields<'_>,
    max_position_embeddings: usize,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<Rope, LoadError> {
    read_parameters(fields, parameters(fields)?, max_position_embeddings, head_dim, defaults)
}

/// Reads the parameters of layers of this type, for families whose types differ: `rope_parameters` has an object for each.
/// `None` if it has none.
pub(super) fn read_type(
    fields: &Fields<'_>,
    layer_type: &str,
    max_position_embeddings: usize,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<Option<Rope>, LoadError> {
    let Some(of_types) = parameters(fields)? else { return Ok(None) };
    let Some(of_type) = of_types.get(layer_type).and_then(|_| of_types.object(layer_type).transpose()) else {
        return Ok(None);
    };
    read_parameters(fields, Some(of_type?), max_position_embeddings, head_dim, defaults).map(Some)
}

/// A number among the parameters, at least 0.
pub(super) fn number(fields: &Fields<'_>, key: &str) -> Result<Option<f64>, LoadError> {
    match parameters(fields)? {
        Some(parameters) => not_negative(&parameters, key),
        None => Ok(None),
    }
}

fn parameters<'a>(fields: &Fields<'a>) -> Result<Option<Fields<'a>>, LoadError> {
    match fields.object("rope_scaling")? {
        Some(parameters) if !parameters.is_empty() => Ok(Some(parameters)),
        _ => fields.object("rope_parameters"),
    }
}

fn read_parameters(
    fields: &Fields<'_>,
    parameters: Option<Fields<'_>>,
    max_position_embeddings: usize,
    head_dim: usize,
    defaults: RopeDefaults,
) -> Result<Rope, LoadError> {
    let share = |fields: &Fields<'_>, key: &str| {
        fields.float(key, "a share of the head, above 0 and at most 1", |share| share > 0.0 && share <= 1.0)
    };
    let outer_theta = positive(fields, defaults.theta.0)?;
    let outer_share = share(fields, defaults.partial.0)?;
    let (inner_theta, inner_share) = match &parameters {
        None => (None, None),
        Some(inner) => (positive(inner, "rope_theta")?, share(inner, "partial_rotary_factor")?),
    };
    let theta = inner_theta.or(outer_theta).unwrap_or(defaults.theta.1);
    let partial = inner_share.or(outer_share).unwrap_or(defaults.partial.1);
    if let Some(inner) = parameters.as_ref().filter(|inner| inner.get("rope_type") == Some(&"proportional".into())) {
        let factor = inner.float("factor", AT_LEAST_1, |value| value >= 1.0)?.unwrap_or(1.0);
        return Ok(proportional(theta, head_dim, partial, factor));
    }
    let dims = match defaults.dims {
        Some((key, default)) => sizes::optional(fields, key, MAX_HEAD_DIM)?.unwrap_or(default),
        None => (head_dim as f64 * partial) as usize,
    };
    if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
        let of_head = if fields.get("head_dim").is_some() { "head_dim" } else { "hidden_size" };
        let of_share = if partial == 1.0 { of_head } else { defaults.partial.0 };
        let key = defaults.dims.map_or(of_share, |(key, _)| key);
        let expected = format!("an even number of rotated elements per head, above 0; it is {dims} of {head_dim}");
        return Err(fields.wrong(key, expected));
    }
    let theta = match &parameters {
        Some(parameters) => grown_base(parameters, theta, dims)?,
        None => theta,
    };
    let scaling = match &parameters {
        None => RopeScaling::None,
        Some(parameters) => scaling(fields, parameters, max_position_embeddings, dims)?,
    };
    Ok(Rope { theta, dims, interleaved: defaults.interleaved, scaling })
}

/// A rotation of the first pairs of a head of even size.
pub(super) fn proportional(theta: f64, head_dim: usize, partial: f64, factor: f64) -> Rope {
    let pairs = (partial * head_dim as f64 / 2.0) as usize;
    Rope { theta, dims: head_dim, interleaved: false, scaling: RopeScaling::Proportional { pairs, factor } }
}

/// RoPE base after Hunyuan's `alpha` scaling, which is independent of the context length.
fn grown_base(parameters: &Fields<'_>, theta: f64, dims: usize) -> Result<f64, LoadError> {
    let Some(alpha) = positive(parameters, "alpha")? else { return Ok(theta) };
    let grown = theta * alpha.powf(dims as f64 / (dims as f64 - 2.0));
    match grown.is_finite() {
        true => Ok(grown),
        false => Err(parameters.wrong("alpha", format!("a number whose power for {dims} rotated elements is finite"))),
    }
}

const ORIGINAL: &str = "original_max_position_embeddings";
const AT_LEAST_1: &str = "a number, at least 1, in the range of float32";

fn scaling(
    fields: &Fields<'_>,
    parameters: &Fields<'_>,
    max_position_embeddings: usize,
    dims: usize,
) -> Result<RopeScaling, LoadError> {
    let type_key = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    let most = max_position_embeddings as f64;
    let optional_factor = || parameters.float("factor", AT_LEAST_1, |value| value >= 1.0 && (value as f32).is_finite());
    let factor = || optional_factor()?.ok_or_else(|| parameters.wrong("factor", AT_LEAST_1));
    // Beside the object it takes precedence.
    let original =
        || Ok::<_, LoadError>(positive(fields, ORIGINAL)?.or(positive(parameters, ORIGINAL)?).unwrap_or(most));
    let kind = parameters.string(type_key)?;
    // Early Phi-3 checkpoints call it "su" or "yarn".
    let lists = parameters.get("short_factor").is_some() || parameters.get("long_factor").is_some();
    Ok(match kind {
        None | Some("default" | "mrope") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor()? },
        Some("dynamic") if parameters.get("alpha").is_some() => RopeScaling::None,
        Some("dynamic") => {
            let context = most;
            RopeScaling::Dynamic { factor: factor()?, max_position_embeddings: most, context }
        }
        // That of GTE, for any context.
        Some("ntk") => {
            if parameters.get("mixed_b").is_some() {
                return Err(parameters.wrong("mixed_b", "null"));
            }
            ntk(factor()?, dims, most)
        }
        Some("llama3") => {
            let number =
                |key: &str| positive(parameters, key)?.ok_or_else(|| parameters.wrong(key, "a number above 0"));
            let (low_freq_factor, high_freq_factor) = (number("low_freq_factor")?, number("high_freq_factor")?);
            if high_freq_factor <= low_freq_factor {
                let expected = format!("more than `low_freq_factor`, {low_freq_factor}");
                return Err(parameters.wrong("high_freq_factor", expected));
            }
            RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: original()?,
            }
        }
        Some("longrope" | "su") => longrope(parameters, optional_factor()?, original()?, most, dims)?,
        Some("yarn") if lists => longrope(parameters, optional_factor()?, original()?, most, dims)?,
        Some("yarn") => {
            let original = original()?;
            let factor = optional_factor()?.unwrap_or(most / original);
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast: positive(parameters, "beta_fast")?.unwrap_or(32.0),
                beta_slow: positive(parameters, "beta_slow")?.unwrap_or(1.0),
                truncate: parameters.boolean("truncate")?.unwrap_or(true),
                attention_factor: yarn_attention_factor(parameters, factor)?,
            }
        }
        Some(_) => {
            let expected =
                "\"default\", \"linear\", \"dynamic\", \"ntk\", \"llama3\", \"yarn\", \"longrope\" or \"proportional\"";
            return Err(parameters.wrong(type_key, expected));
        }
    })
}

/// `0.1 * mscale * ln(factor) + 1`, the growth of scores with the factor of YaRN.
pub(super) fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

fn yarn_attention_factor(parameters: &Fields<'_>, factor: f64) -> Result<f64, LoadError> {
    let stated = not_negative(parameters, "attention_factor")?;
    let mscale = not_negative(parameters, "mscale")?.unwrap_or(0.0);
    let all_dim = not_negative(parameters, "mscale_all_dim")?.unwrap_or(0.0);
    Ok(match stated {
        Some(stated) => stated,
        None if mscale != 0.0 && all_dim != 0.0 => yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim),
        None => yarn_mscale(factor, 1.0),
    })
}

/// A base that is `factor` times as great, and a divisor of all frequencies besides with which the first pair turns as much less as the
/// others turn less than those before them.
fn ntk(factor: f64, dims: usize, most: f64) -> RopeScaling {
    let divisor = |pair: usize| factor.powf((2 * pair) as f64 / dims as f64);
    let divisors: Vec<f64> = (1..=dims / 2).map(divisor).collect();
    RopeScaling::LongRope {
        short_factor: divisors.clone(),
        long_factor: divisors,
        original_max_position_embeddings: most,
        short_attention_factor: 1.0,
        long_attention_factor: 1.0,
        context: most,
    }
}

fn longrope(
    parameters: &Fields<'_>,
    factor: Option<f64>,
    original: f64,
    most: f64,
    dims: usize,
) -> Result<RopeScaling, LoadError> {
    let list = |key: &str| {
        let expected = format!("a list of {} numbers above 0, one per pair of rotated elements", dims / 2);
        let numbers = parameters.read(key, &expected, |value| {
            let numbers: Option<Vec<f64>> = value.as_array()?.iter().map(|number| number.as_f64()).collect();
            let fits = |numbers: &Vec<f64>| numbers.len() == dims / 2 && numbers.iter().all(|x| *x > 0.0);
            numbers.filter(fits)
        })?;
        numbers.ok_or_else(|| parameters.wrong(key, expected))
    };
    let factor = factor.unwrap_or(most / original);
    let stated = positive(parameters, "attention_factor")?;
    let computed = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
    let of_list = |key: &str| Ok::<_, LoadError>(positive(parameters, key)?.or(stated).unwrap_or(computed));
    Ok(RopeScaling::LongRope {
        short_factor: list("short_factor")?,
        long_factor: list("long_factor")?,
        original_max_position_embeddings: original,
        short_attention_factor: of_list("short_mscale")?,
        long_attention_factor: of_list("long_mscale")?,
        context: most,
    })
}
