package exec

import (
	"bytes"
	"crypto/tls"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
)

// identity has the paths of the PEM files by which crius authenticates to the server.
type identity struct{ cert, key string }

// config returns the TLS configuration for a server that has the certificate in serverCert
// and, unless clientCA is empty, requires one of clients. It trusts only that certificate:
// its names and its authority are meant for clients that the kubelet redirects, and may not
// be valid on the node itself.
func (i identity) config(serverCert, clientCA string) (*tls.Config, error) {
	config := &tls.Config{
		InsecureSkipVerify: true, // VerifyConnection is stricter
		VerifyConnection: func(with tls.ConnectionState) error {
			if serverCert == "" {
				return errors.New("the server uses TLS, but api.stream_tls_cert_file is not set: use the server's configuration, or pass --api-stream-tls-cert-file")
			}
			text, err := os.ReadFile(serverCert)
			if err != nil {
				return err
			}
			if block, _ := pem.Decode(text); block == nil || !bytes.Equal(block.Bytes, with.PeerCertificates[0].Raw) {
				return fmt.Errorf("the server's certificate is not the one in %s (api.stream_tls_cert_file)", serverCert)
			}
			return nil
		},
	}
	if clientCA == "" {
		return config, nil
	}
	if i.cert == "" || i.key == "" {
		return nil, errors.New("the server wants client certificates (api.stream_tls_client_ca_file): pass --tls-cert and --tls-key")
	}
	ours, err := tls.LoadX509KeyPair(i.cert, i.key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert and --tls-key: %w", err)
	}
	config.Certificates = []tls.Certificate{ours}
	return config, nil
}
