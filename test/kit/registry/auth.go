package registry

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

const tokenPath = "/token"

// Auth says who may pull. The zero value admits everyone.
type Auth struct {
	Username, Password string
	IdentityToken      string // accepted by the token endpoint as an OAuth2 refresh token
	RegistryToken      string // accepted unchanged in "Authorization: Bearer"

	// Bearer sends clients to the token endpoint instead of asking for Basic.
	Bearer bool
	// Realm is the token endpoint's URL; empty: this registry's own.
	Realm string
	// Tokens is the registry whose endpoint issues tokens for this one; nil: this
	// registry itself.
	Tokens *Registry
}

// Require requires credentials from now on.
func (r *Registry) Require(a Auth) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.auth = a
}

// ExpireTokens ends all tokens that have been issued, whatever they say.
func (r *Registry) ExpireTokens() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.tokens)
}

// admit passes an authorized request on and answers any other.
func (r *Registry) admit(w http.ResponseWriter, req *http.Request) bool {
	r.mu.Lock()
	auth := r.auth
	r.mu.Unlock()
	switch {
	case auth == (Auth{}):
		return true
	case !auth.Bearer:
		if user, password, ok := req.BasicAuth(); ok && user == auth.Username && password == auth.Password {
			return true
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="testkit"`)
	default:
		issuer := auth.Tokens
		if issuer == nil {
			issuer = r
		}
		if issuer.issued(req.Header.Get("Authorization"), auth) {
			return true
		}
		realm := auth.Realm
		if realm == "" {
			realm = "http://" + req.Host + tokenPath
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm=%q,service="testkit"`, realm))
	}
	refuse(w, http.StatusUnauthorized, "UNAUTHORIZED", "authentication required")
	return false
}

func (r *Registry) issued(authorization string, auth Auth) bool {
	if auth.RegistryToken != "" && authorization == "Bearer "+auth.RegistryToken {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tokens[authorization]
}

// serveToken issues a token for the right user name and password (GET) or for
// the right identity token (POST), like docker's token server.
func (r *Registry) serveToken(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	user, password, basic := req.BasicAuth()
	ok := basic && r.auth.Username != "" && user == r.auth.Username && password == r.auth.Password
	if req.Method == http.MethodPost {
		ok = r.auth.IdentityToken != "" && req.PostForm.Get("refresh_token") == r.auth.IdentityToken
	}
	if !ok {
		refuse(w, http.StatusUnauthorized, "UNAUTHORIZED", "wrong credentials")
		return
	}
	token := rand.Text()
	r.tokens["Bearer "+token] = true
	reply(w, map[string]any{"token": token, "access_token": token, "expires_in": 300})
}

func (in *repository) tagList(repo string) []byte {
	list, _ := json.Marshal(map[string]any{"name": repo, "tags": slices.Sorted(maps.Keys(in.tags))}) // strings always encode
	return list
}

func reply(w http.ResponseWriter, document any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(document) // a client that is gone needs no answer
}

func refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	reply(w, map[string]any{"errors": []map[string]string{{"code": code, "message": message}}})
}
