//! Flags of `vllm serve` that orchestrators such as KServe pass whatever the engine is. Nothing reads them: what has nothing to change
//! here is accepted, and what would be missed is refused.

use clap::Args;

#[derive(Debug, Args)]
#[command(next_help_heading = "Accepted for the command lines of vLLM")]
pub struct VllmArgs {
    /// Accepted without effect: requests of probes and scrapers are never logged
    #[arg(long, value_name = "PATHS")]
    pub disable_access_log_for_endpoints: Option<String>,
    /// Accepted without effect: there is no access log
    #[arg(long)]
    pub disable_uvicorn_access_log: bool,
    /// Accepted without effect: --log-level sets the level of the log
    #[arg(long, value_name = "LEVEL", value_parser = ["critical", "error", "warning", "info", "debug", "trace"])]
    pub uvicorn_log_level: Option<String>,
    /// Accepted without effect: there are no certificates to load again
    #[arg(long)]
    pub enable_ssl_refresh: bool,
    /// Refused: TLS is the task of a proxy
    #[arg(long, value_name = "FILE", value_parser = no_tls)]
    pub ssl_certfile: Option<String>,
    /// Refused: TLS is the task of a proxy
    #[arg(long, value_name = "FILE", value_parser = no_tls)]
    pub ssl_keyfile: Option<String>,
    /// Refused: TLS is the task of a proxy
    #[arg(long, value_name = "FILE", value_parser = no_tls)]
    pub ssl_ca_certs: Option<String>,
}

/// A server that was told to use TLS must not serve without it.
fn no_tls(_: &str) -> Result<String, String> {
    Err("expected no such flag: this server speaks HTTP only; remove it and let a proxy in front terminate TLS"
        .to_string())
}
