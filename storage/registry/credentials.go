package registry

import (
	"encoding/base64"
	"fmt"
	"net/url"
	"os"
	"strings"

	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/pkg/docker/config"
	"go.podman.io/image/v5/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crius-run/crius/internal/fault"
)

// Credentials are what a request brings for the registry of one image name.
type Credentials struct {
	config   types.DockerAuthConfig
	registry string // bearer token to send as it is
}

// CredentialsFor reads CRI's AuthConfig: registry_token, identity_token,
// username and password, or auth, which is their base64 form. Credentials
// whose server_address is not the registry of the image are not sent anywhere.
// It returns nil for none.
func CredentialsFor(auth *cri.AuthConfig, name reference.Named) (*Credentials, error) {
	if auth == nil || !serves(auth.ServerAddress, reference.Domain(name)) {
		return nil, nil
	}
	found := Credentials{
		config: types.DockerAuthConfig{
			Username:      auth.Username,
			Password:      auth.Password,
			IdentityToken: auth.IdentityToken,
		},
		registry: auth.RegistryToken,
	}
	if auth.Username == "" && auth.Auth != "" {
		var err error
		if found.config.Username, found.config.Password, err = decodeAuth(auth.Auth); err != nil {
			return nil, err
		}
	}
	if found == (Credentials{}) {
		return nil, nil
	}
	return &found, nil
}

// decodeAuth splits base64(user:password). Like docker it ignores line breaks
// within the base64 text and NULs around the password; a line break at the end
// of the password is part of it.
func decodeAuth(auth string) (user, password string, err error) {
	decoded, err := base64.StdEncoding.DecodeString(auth)
	if err != nil { // the text stays out of the error: it is a secret
		return "", "", fmt.Errorf("credentials: auth is not valid base64: %w", fault.Invalid)
	}
	user, password, found := strings.Cut(string(decoded), ":")
	if !found || user == "" {
		return "", "", fmt.Errorf("credentials: auth does not hold user:password: %w", fault.Invalid)
	}
	return user, strings.Trim(password, "\x00"), nil
}

// serves reports whether credentials for a server address are for a registry.
// The address is a host with or without port, scheme and path; an empty one
// means any registry.
func serves(address, registry string) bool {
	if address == "" {
		return true
	}
	if !strings.Contains(address, "://") {
		address = "https://" + address
	}
	server, err := url.Parse(address)
	return err == nil && canonicalHost(server.Host) == canonicalHost(registry)
}

// canonicalHost returns the host in lower case, and one name for Docker Hub's three.
func canonicalHost(host string) string {
	host = strings.TrimSuffix(strings.ToLower(host), ":443")
	switch host {
	case "index.docker.io", "registry-1.docker.io":
		return "docker.io"
	}
	return host
}

// Apply gives the credentials to the library, which sends them to the registry
// of the image's name and to no mirror. The library decides this by
// DockerAuthConfig, so a registry token needs one as well. Nil credentials
// change nothing.
func (c *Credentials) Apply(sys *types.SystemContext) {
	if c == nil {
		return
	}
	sys.DockerAuthConfig = &c.config
	sys.DockerBearerRegistryToken = c.registry
}

// Login says with which credentials the library asks the registry of a name, for the case that the
// registry refuses them, and what to do then. c and sys are those of the pull, auth is what its
// request has brought. Of the node's own credentials it says where they are: pods' events show it.
func (c *Credentials) Login(sys *types.SystemContext, auth *cri.AuthConfig, name reference.Named, ofNamespace bool) string {
	host := reference.Domain(name)
	switch {
	case c != nil && c.config.Username != "":
		return fmt.Sprintf("%s refused %s of the pull request: correct the pull secret of the pod", host, user(c.config.Username))
	case c != nil:
		return fmt.Sprintf("%s refused the token of the pull request: renew the pull secret of the pod", host)
	case ofNamespace:
		return fmt.Sprintf("%s refused what a credential provider left in image.namespaced_auth_dir for the pod's namespace: correct its source", host)
	}
	stored, err := config.GetCredentialsForRef(sys, name)
	_, absent := os.Stat(sys.AuthFilePath)
	switch {
	case err != nil:
		return fmt.Sprintf("the node's credentials for %s cannot be read: correct %s or the credential helper", host, sys.AuthFilePath)
	case stored != (types.DockerAuthConfig{}) && absent != nil:
		return fmt.Sprintf("%s refused the credentials of the node's credential helper: renew them, or give the pod a pull secret", host)
	case stored != (types.DockerAuthConfig{}):
		return fmt.Sprintf("%s refused the credentials in %s: correct that file, or give the pod a pull secret", host, sys.AuthFilePath)
	case auth != nil && auth.ServerAddress != "":
		return fmt.Sprintf("no credentials were sent to %s, since those of the pull request are for another registry: check the pull secret of the pod", host)
	}
	return fmt.Sprintf("no credentials were sent to %s: give the pod a pull secret or set image.auth_file, if the name is correct", host)
}

// user names a user. Some registries take a token for one, which is longer than names of people and
// is not shown.
func user(name string) string {
	if len(name) > 32 {
		return "the user"
	}
	return fmt.Sprintf("user %q", name)
}

// Secrets returns the texts that no error may show.
func Secrets(auth *cri.AuthConfig) []string {
	if auth == nil {
		return nil
	}
	all := []string{auth.Password, auth.Auth, auth.IdentityToken, auth.RegistryToken}
	user, password := auth.Username, auth.Password
	if u, p, err := decodeAuth(auth.Auth); err == nil {
		user, password = u, p
		all = append(all, password)
	}
	if password != "" {
		all = append(all, base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
	}
	return all
}
