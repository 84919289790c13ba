//! How the values of flags are written: whole numbers, sizes in bytes, names, policies, and flags that so far have one value. The parser shows
//! what was found and names the flag; the errors here say what was expected.

use std::path::PathBuf;

use engine::text::ToolFormat;
use engine::{Dtype, KvCacheDtype, Policy, Pooling, PreemptionMode, Quantization};

pub use ::bench::values::{key, whole};
use server::{Host, Reasoning};

/// A count that is not 0.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| "expected a whole number from 1".to_string())
}

/// `--threads`. More than there are cores would only wait for each other.
pub fn threads(text: &str) -> Result<usize, String> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let count = text.parse().ok().filter(|count| (1..=cores).contains(count));
    count.ok_or_else(|| format!("expected a whole number from 1 to {cores}, the cores that this process may use"))
}

/// Any text but none.
pub fn filled(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("expected at least one character".to_string()) } else { Ok(text.to_string()) }
}

/// A file to write. `json = true` in a settings file is another command's.
pub fn file(text: &str) -> Result<PathBuf, String> {
    match text {
        "" | "true" | "false" => Err("expected the path of a file".to_string()),
        path => Ok(path.into()),
    }
}

/// `512M`, `2G`, `1.5GiB` or plain bytes; the letters are powers of 1024.
pub fn bytes(text: &str) -> Result<u64, String> {
    let problem = || "expected bytes such as 512M or 2G".to_string();
    let upper = text.trim().to_ascii_uppercase();
    let digits = upper.trim_end_matches("IB").trim_end_matches('B');
    let (number, power) = match digits.char_indices().last() {
        Some((end, letter)) if letter.is_ascii_alphabetic() => {
            (&digits[..end], 1 + "KMGT".find(letter).ok_or_else(problem)? as i32)
        }
        _ => (digits, 0),
    };
    let number: f64 = number.trim().parse().map_err(|_| problem())?;
    let bytes = number * 1024f64.powi(power);
    // Beyond 2^53 a double no longer counts bytes one by one.
    if bytes == 0.0 {
        return Err("expected bytes above 0, such as 512M or 2G".to_string());
    }
    if bytes >= 1.0 && bytes <= (1u64 << 53) as f64 { Ok(bytes as u64) } else { Err(problem()) }
}

/// Seconds, as 30 or 0.5: above 0, at most a year.
pub fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|n| *n > 0.0 && *n <= 366.0 * 86400.0);
    seconds.ok_or_else(|| "expected a number of seconds above 0, such as 30 or 0.5".to_string())
}

/// Something that can stand in a header: an origin, a method, a name.
pub fn header(text: &str) -> Result<String, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',') {
        return Ok(text.to_string());
    }
    Err("expected one origin, method or header name without blanks and commas; give the flag several times".to_string())
}

/// `--allowed-hosts`.
pub fn host(text: &str) -> Result<String, String> {
    if text == "*" || Host::parse(text).is_some() {
        return Ok(text.to_string());
    }
    Err("expected a host name without a scheme, as models.example.org, or *".to_string())
}

/// `--log-level`.
pub fn log_filter(text: &str) -> Result<String, String> {
    let checked = tracing_subscriber::EnvFilter::try_new(text);
    checked
        .map(|_| text.to_string())
        .map_err(|error| format!("expected warn, info, debug, or engine=debug,warn: {error}"))
}

/// `--tool-call-parser`.
pub fn tool_format(text: &str) -> Result<ToolFormat, String> {
    text.parse().map_err(str::to_string)
}

/// `--reasoning-parser`.
pub fn reasoning(text: &str) -> Result<Reasoning, String> {
    text.parse().map_err(str::to_string)
}

/// `--pooling-type`.
pub fn pooling(text: &str) -> Result<Pooling, String> {
    text.parse().map_err(str::to_string)
}

/// `--scheduling-policy`.
pub fn policy(text: &str) -> Result<Policy, String> {
    match text {
        "fcfs" => Ok(Policy::Fcfs),
        "priority" => Ok(Policy::Priority),
        _ => Err("expected fcfs or priority".to_string()),
    }
}

/// `--quantization`.
pub fn quantization(text: &str) -> Result<Quantization, String> {
    text.parse().map_err(|expected| format!("{expected}; leave it out to keep the checkpoint's type"))
}

fn only(text: &str, accepted: &[&str], why: &str) -> Result<String, String> {
    if accepted.contains(&text) {
        return Ok(text.to_string());
    }
    Err(format!("expected {}: {why}", accepted.join(" or ")))
}

/// A value of `--dtype`; `None` is `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DtypeChoice(pub Option<Dtype>);

/// `--dtype`.
pub fn dtype(text: &str) -> Result<DtypeChoice, String> {
    Ok(DtypeChoice(match text {
        "auto" => None,
        "float32" | "float" => Some(Dtype::F32),
        "float16" | "half" => Some(Dtype::F16),
        "bfloat16" => Some(Dtype::Bf16),
        _ => return Err("expected auto, float32, float16 or bfloat16".to_string()),
    }))
}

/// A value of `--max-model-len`; `None` is `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Length(pub Option<usize>);

/// `--max-model-len`.
pub fn max_model_len(text: &str) -> Result<Length, String> {
    if text == "auto" { Ok(Length(None)) } else { whole(text).map(|length| Length(Some(length))) }
}

/// `--kv-cache-dtype`.
pub fn kv_cache_dtype(text: &str) -> Result<KvCacheDtype, String> {
    text.parse().map_err(str::to_string)
}

/// `--tensor-parallel-size`.
pub fn tensor_parallel_size(text: &str) -> Result<String, String> {
    only(text, &["1"], "a model runs on one device; sharding is not built yet")
}

/// `--swap-space`, in GiB; the value is bytes.
pub fn swap_space(text: &str) -> Result<u64, String> {
    let gib = text.parse().ok().filter(|gib: &f64| (0.0..=1e6).contains(gib));
    let bytes = gib.map(|gib| (gib * f64::from(1 << 30)) as u64);
    bytes.ok_or_else(|| "expected a number of GiB, 0 or more, such as 4 or 0.5".to_string())
}

/// `--preemption-mode`.
pub fn preemption_mode(text: &str) -> Result<PreemptionMode, String> {
    match text {
        "auto" => Ok(PreemptionMode::Auto),
        "recompute" => Ok(PreemptionMode::Recompute),
        "swap" => Ok(PreemptionMode::Swap),
        _ => Err("expected auto, recompute or swap".to_string()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn bytes_come_with_or_without_a_unit() {
        assert_eq!(bytes("1048576"), Ok(1 << 20));
        assert_eq!(bytes("512M"), Ok(512 << 20));
        assert_eq!(bytes("2g"), Ok(2 << 30));
        assert_eq!(bytes("1.5GiB"), Ok(3 << 29));
        assert_eq!(bytes("64 kB"), Ok(64 << 10));
        for bad in ["", "G", "-1", "0", "2X", "1e400", "nan", "é", "9999999T"] {
            assert!(bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn swap_space_is_in_gib_and_may_be_none() {
        assert_eq!((swap_space("0"), swap_space("1.5")), (Ok(0), Ok(3 << 29)));
        for bad in ["", "-1", "4G", "nan", "inf", "1e9"] {
            assert!(swap_space(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn no_bytes_are_told_from_no_number() {
        assert!(bytes("0").unwrap_err().contains("above 0"));
        assert!(!bytes("lots").unwrap_err().contains("above 0"));
    }

    #[test]
    fn whole_numbers_tell_their_range() {
        assert_eq!(whole::<u16>("65535"), Ok(65535));
        assert_eq!(whole::<u64>("18446744073709551615"), Ok(u64::MAX));
        for bad in ["65536", "-1", "1.5", "", "x"] {
            assert_eq!(whole::<u16>(bad), Err("expected a whole number from 0 to 65535".to_string()));
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!((threads("1"), threads(&cores.to_string())), (Ok(1), Ok(cores)));
        let problem = threads(&(cores + 1).to_string()).unwrap_err();
        assert!(threads("0").is_err() && problem.contains(&format!("to {cores}, the cores")), "{problem}");
        assert!(positive("0").is_err() && positive("7") == Ok(7));
    }

    #[test]
    fn a_flag_with_one_value_says_so_otherwise() {
        assert!(dtype("auto").is_ok());
        let problem = tensor_parallel_size("2").unwrap_err();
        assert!(problem.starts_with("expected 1: "), "{problem}");
    }
}
