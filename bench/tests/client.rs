//! Addresses of servers.

use bench::client::Server;

#[test]
fn a_url_is_parsed_or_refused() {
    let shown = |url: &str| format!("{:?}", Server::new(url, None).unwrap());
    let found = shown("http://localhost/api/");
    assert!(found.contains("authority: \"localhost:80\"") && found.contains("prefix: \"/api\""), "{found}");
    assert!(shown("http://[::1]:8000").contains("authority: \"[::1]:8000\""));
    for wrong in ["localhost:8000", "ftp://a", "https://a", "", "http://"] {
        assert!(Server::new(wrong, None).unwrap_err().contains("expected http://HOST:PORT"), "{wrong}");
    }
}
