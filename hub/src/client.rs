//! Requests to a hub: redirects, the token, repetitions, and what a refusal means.
//!
//! Redirects are followed here and not by the HTTP library: the first answer states the hash and size of a file, and the token goes to
//! the endpoint's origin only. Every wait and every answer kept in memory has a limit.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Deserialize;
use ureq::http::header::{AUTHORIZATION, CONTENT_LENGTH, ETAG, LOCATION, RANGE, RETRY_AFTER};
use ureq::http::{HeaderName, Response};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body};

use crate::error::{HubError, at, shown};
use crate::etag::Etag;
use crate::id::{Commit, ModelId};
use crate::options::Options;
use crate::path::RepoPath;
use crate::progress::{Event, Progress};
use crate::url::Url;

const MAX_REDIRECTS: usize = 10;
/// Attempts of a request without any progress between them.
pub(crate) const ATTEMPTS: u32 = 5;
/// Attempts to reach a hub that is not needed, because there is a cached snapshot.
const FEW_ATTEMPTS: u32 = 2;
/// Longest `Retry-After` that is waited for.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Limits of a listing: its bytes, and its files.
const MAX_LISTING_BYTES: u64 = 16 << 20;
const MAX_LISTED_FILES: usize = 100_000;
/// Longest transfer of a listing.
const LISTING_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_CERTIFICATE_BYTES: u64 = 16 << 20;

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failure {
    pub error: HubError,
    /// Whether and when to try again.
    retry: Retry,
}

#[derive(Debug)]
enum Retry {
    No,
    /// After a pause that doubles with each attempt.
    Soon,
    After(Duration),
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Failure {
        Failure { error, retry: Retry::No }
    }
}

impl Failure {
    pub fn soon(error: HubError) -> Failure {
        Failure { error, retry: Retry::Soon }
    }
}

/// Which request is made.
#[derive(Clone, Copy, Debug)]
enum Ask {
    /// The files of a revision.
    Listing,
    /// Only the headers of the first answer that describes the file.
    Metadata,
    /// The contents from this byte.
    Contents { from: u64 },
    /// The contents of this range.
    Part { from: u64, to: u64 },
}

/// Name and size that the hub states for a file.
#[derive(Clone, Debug)]
pub(crate) struct Metadata {
    pub file: RepoPath,
    pub etag: Etag,
    pub size: u64,
}

/// The files of a revision.
pub(crate) struct Listing {
    pub commit: Commit,
    /// Names of the files, and the sizes that are stated.
    pub files: BTreeMap<String, Option<u64>>,
}

/// A client of one repository.
pub(crate) struct Client<'a> {
    agent: Agent,
    options: &'a Options,
    model: &'a ModelId,
    progress: &'a Progress<'a>,
    /// Set when another thread has failed, so that this one stops.
    pub stop: AtomicBool,
}

impl<'a> Client<'a> {
    pub fn new(options: &'a Options, model: &'a ModelId, progress: &'a Progress<'a>) -> Result<Client<'a>, HubError> {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("quire/", env!("CARGO_PKG_VERSION")))
            // A compressed answer would have another size and hash.
            .accept_encoding("identity")
            .timeout_connect(Some(options.metadata_timeout))
            .timeout_recv_response(Some(options.metadata_timeout))
            .timeout_per_read(Some(options.read_timeout))
            .tls_config(TlsConfig::builder().root_certs(certificates(options)?).build());
        Ok(Client { agent: config.build().into(), options, model, progress, stop: AtomicBool::new(false) })
    }

    /// The files of the revision in the options. Gives up sooner if there is another way.
    pub fn listing(&self, is_needed: bool) -> Result<Listing, HubError> {
        #[derive(Deserialize)]
        struct Info {
            sha: String,
            #[serde(default)]
            siblings: Vec<Sibling>,
        }
        #[derive(Deserialize)]
        struct Sibling {
            rfilename: String,
            #[serde(default)]
            size: Option<u64>,
        }
        let parts = ["api", "models"].into_iter().chain(self.model.repo().split('/'));
        let url = self.options.endpoint.join(parts.chain(["revision", self.options.revision.as_str()]))?;
        let url = url.with_query("blobs=true")?;
        let unusable = |found: String, expected| HubError::Answer { host: url.host().to_string(), found, expected };
        let bytes = self.repeat(if is_needed { ATTEMPTS } else { FEW_ATTEMPTS }, || {
            let mut answer = self.request(&url, Ask::Listing, None)?;
            answer.body_mut().with_config().limit(MAX_LISTING_BYTES).read_to_vec().map_err(|error| match error {
                ureq::Error::BodyExceedsLimit(limit) => {
                    unusable(format!("a listing of more than {limit} bytes"), "a shorter one").into()
                }
                other => Failure::soon(network(&url, &other)),
            })
        })?;
        let info: Info = serde_json::from_slice(&bytes)
            .map_err(|error| unusable(shown(&format!("a listing that is not valid ({error})")), "JSON"))?;
        if info.siblings.len() > MAX_LISTED_FILES {
            return Err(unusable(format!("a listing of {} files", info.siblings.len()), "at most 100000"));
        }
        let commit = Commit::parse(&info.sha)
            .ok_or_else(|| unusable(format!("the commit {:?}", shown(&info.sha)), "40 lowercase hexadecimal digits"))?;
        Ok(Listing {
            commit,
            files: info.siblings.into_iter().map(|sibling| (sibling.rfilename, sibling.size)).collect(),
        })
    }

    /// Hash and size of a file.
    pub fn metadata(&self, commit: &Commit, file: &RepoPath) -> Result<Metadata, HubError> {
        let url = self.url(commit, file)?;
        let answer = self.repeat(ATTEMPTS, || self.request(&url, Ask::Metadata, Some((file, commit))))?;
        let unusable = |found: String, expected| HubError::Answer { host: url.host().to_string(), found, expected };
        if let Some(other) = header(&answer, X_REPO_COMMIT).filter(|found| *found != commit.as_str()) {
            return Err(unusable(format!("commit {:?} of {file}", shown(other)), "the commit that was listed"));
        }
        let stated = header(&answer, X_LINKED_ETAG).or_else(|| header(&answer, ETAG));
        let etag = stated.and_then(Etag::parse).ok_or_else(|| {
            let found = format!("the etag {:?} of {file}", shown(stated.unwrap_or_default()));
            unusable(found, "a hash of 64 or 40 lowercase hexadecimal digits")
        })?;
        let size = header(&answer, X_LINKED_SIZE).or_else(|| header(&answer, CONTENT_LENGTH));
        let size = size.and_then(|size| size.parse().ok()).ok_or_else(|| {
            unusable(format!("the size {:?} of {file}", shown(size.unwrap_or_default())), "a number of bytes")
        })?;
        Ok(Metadata { file: file.clone(), etag, size })
    }

    /// The contents of a file from byte `from`: an answer with status 200 (from 0), 206 or 416.
    pub fn contents(&self, commit: &Commit, file: &RepoPath, from: u64) -> Result<Response<Body>, Failure> {
        self.request(&self.url(commit, file)?, Ask::Contents { from }, Some((file, commit)))
    }

    /// Bytes of a file: an answer with status 206, or 200 from a server without ranges.
    pub fn range(&self, commit: &Commit, file: &RepoPath, range: &Range<u64>) -> Result<Response<Body>, Failure> {
        self.request(&self.url(commit, file)?, Ask::Part { from: range.start, to: range.end }, Some((file, commit)))
    }

    fn url(&self, commit: &Commit, file: &RepoPath) -> Result<Url, HubError> {
        let parts = self.model.repo().split('/').chain(["resolve", commit.as_str()]);
        self.options.endpoint.join(parts.chain(file.as_str().split('/')))
    }

    /// A failure of a transfer.
    pub fn broken(&self, problem: String) -> Failure {
        Failure::soon(HubError::Network { host: self.options.endpoint.host().to_string(), problem: shown(&problem) })
    }

    /// An answer that the protocol does not allow.
    pub fn unusable(&self, found: String, expected: &'static str) -> HubError {
        HubError::Answer { host: self.options.endpoint.host().to_string(), found, expected }
    }

    /// Calls `attempt` until it succeeds or fails for good, with pauses.
    fn repeat<T>(&self, attempts: u32, mut attempt: impl FnMut() -> Result<T, Failure>) -> Result<T, HubError> {
        let mut failed = 0;
        loop {
            match attempt() {
                Ok(value) => return Ok(value),
                Err(failure) => self.pause(failure, &mut failed, attempts)?,
            }
        }
    }

    /// Counts a failed attempt and waits before the next one. Returns the error if there is to be none.
    pub fn pause(&self, failure: Failure, failed: &mut u32, attempts: u32) -> Result<(), HubError> {
        *failed += 1;
        let wait = match failure.retry {
            Retry::Soon => self.options.retry_delay.saturating_mul(1 << (*failed - 1).min(8)),
            Retry::After(wait) if wait <= MAX_WAIT => wait,
            Retry::No | Retry::After(_) => return Err(failure.error),
        };
        if *failed >= attempts {
            return Err(failure.error);
        }
        self.progress.report(Event::Retrying { error: &failure.error });
        let end = Instant::now() + wait;
        while !self.is_stopped() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(50)));
        }
        Err(failure.error)
    }

    /// Longest wait for another process that makes no progress.
    pub fn lock_timeout(&self) -> Duration {
        self.options.lock_timeout
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Sends a request and follows its redirects.
    fn request(&self, url: &Url, ask: Ask, about: About<'_>) -> Result<Response<Body>, Failure> {
        let mut url = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = match ask {
                Ask::Metadata => self.agent.head(url.uri()),
                Ask::Listing => self.agent.get(url.uri()).config().timeout_recv_body(Some(LISTING_TIMEOUT)).build(),
                Ask::Contents { .. } | Ask::Part { .. } => self.agent.get(url.uri()),
            };
            let is_home = url.origin() == self.options.endpoint.origin();
            if let Some(token) = self.options.token.as_ref().filter(|_| is_home) {
                request = request.header(AUTHORIZATION, token.bearer());
            }
            match ask {
                Ask::Contents { from: from @ 1.. } => request = request.header(RANGE, format!("bytes={from}-")),
                Ask::Part { from, to } => {
                    request = request.header(RANGE, format!("bytes={from}-{}", to.saturating_sub(1)));
                }
                _ => {}
            }
            let answer = request.call().map_err(|error| Failure::soon(network(&url, &error)))?;
            let is_described = matches!(ask, Ask::Metadata) && header(&answer, X_LINKED_ETAG).is_some();
            match answer.status().as_u16() {
                200 | 206 => return Ok(answer),
                416 if matches!(ask, Ask::Contents { from: 1.. }) => return Ok(answer),
                301 | 302 | 303 | 307 | 308 if is_described => return Ok(answer),
                301 | 302 | 303 | 307 | 308 => url = url.redirect(header(&answer, LOCATION).unwrap_or_default())?,
                _ => return Err(self.refusal(&url, is_home, &answer, about)),
            }
        }
        let found = format!("more than {MAX_REDIRECTS} redirects");
        Err(HubError::Answer { host: url.host().to_string(), found, expected: "fewer" }.into())
    }

    /// What an answer means that is neither a success nor a redirect.
    fn refusal(&self, url: &Url, is_home: bool, answer: &Response<Body>, about: About<'_>) -> Failure {
        let status = answer.status().as_u16();
        let message = header(answer, X_ERROR_MESSAGE).map_or(String::new(), |text| format!(": {}", shown(text)));
        let (host, repo) = (url.host().to_string(), self.model.repo().to_string());
        let (endpoint, has_token) = (self.options.endpoint.to_string(), self.options.token.is_some());
        let wait = header(answer, RETRY_AFTER).and_then(|text| text.trim().parse().ok());
        let retry = wait.map_or(Retry::Soon, |seconds| Retry::After(Duration::from_secs(seconds)));
        if status == 429 {
            return Failure { error: HubError::TooManyRequests { host, wait }, retry };
        }
        // Another host refuses a signed address that has expired. The next attempt gets a new one.
        if status >= 500 || status == 408 || !is_home {
            return Failure { error: HubError::Status { host, status, message }, retry };
        }
        let error = match (status, header(answer, X_ERROR_CODE), about) {
            (401 | 403, Some("GatedRepo"), _) => HubError::Gated { repo, endpoint, has_token },
            (401 | 404, Some("RepoNotFound"), _) => HubError::RepoNotFound { repo, endpoint, has_token },
            (401 | 403, ..) => HubError::Unauthorized { repo, endpoint, status, message, has_token },
            (404, Some("RevisionNotFound"), _) => {
                HubError::RevisionNotFound { repo, revision: self.options.revision.as_str().to_string() }
            }
            (404, _, Some((file, commit))) => {
                HubError::EntryNotFound { repo, file: file.to_string(), commit: commit.as_str().to_string() }
            }
            (404, _, None) => HubError::RepoNotFound { repo, endpoint, has_token },
            _ => HubError::Status { host, status, message },
        };
        error.into()
    }
}

/// The file that a request is for.
type About<'a> = Option<(&'a RepoPath, &'a Commit)>;

const X_ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");
const X_ERROR_MESSAGE: HeaderName = HeaderName::from_static("x-error-message");
const X_LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
const X_LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
const X_REPO_COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");

/// The text of a header. A header that is not text counts as absent.
pub(crate) fn header<B>(answer: &Response<B>, name: HeaderName) -> Option<&str> {
    answer.headers().get(name).and_then(|value| value.to_str().ok())
}

fn network(url: &Url, error: &ureq::Error) -> HubError {
    HubError::Network { host: url.host().to_string(), problem: shown(&error.to_string()) }
}

/// The certificates to trust.
fn certificates(options: &Options) -> Result<RootCerts, HubError> {
    let Some(path) = &options.certificates else { return Ok(RootCerts::WebPki) };
    let damaged = |problem: String| HubError::Setting {
        name: "SSL_CERT_FILE or REQUESTS_CA_BUNDLE",
        problem: format!("{}: {problem}", path.display()),
    };
    let size = std::fs::metadata(path).map_err(at(path))?.len();
    if size > MAX_CERTIFICATE_BYTES {
        return Err(damaged(format!("found {size} bytes, expected a file of certificates")));
    }
    let pem = std::fs::read(path).map_err(at(path))?;
    let mut found = Vec::new();
    for item in parse_pem(&pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| damaged(shown(&error.to_string())))? {
            found.push(certificate);
        }
    }
    if found.is_empty() {
        return Err(damaged("found no certificate, expected a file in PEM format".to_string()));
    }
    Ok(RootCerts::new_with_certs(&found))
}
