package otlp

import (
	"cmp"
	"net"
	"net/url"
)

// Ports at which collectors listen.
const (
	portGRPC = "4317"
	portHTTP = "4318"
)

// orEnvironment fills what the configuration leaves empty by OpenTelemetry's variables. The exporters
// and the SDK read the others themselves: headers, client certificates, compression, batches, resource
// attributes and the sampler.
func (c Config) orEnvironment(env func(string) string) Config {
	if c.Protocol == "auto" {
		c.Protocol = ""
	}
	c.Protocol = cmp.Or(c.Protocol, env("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), env("OTEL_EXPORTER_OTLP_PROTOCOL"))
	configured := c.Endpoint != ""
	ofTraces := cmp.Or(c.Endpoint, env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))
	c.Endpoint = cmp.Or(ofTraces, env("OTEL_EXPORTER_OTLP_ENDPOINT"))
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Host == "" { // connect refuses it
		c.Protocol = cmp.Or(c.Protocol, "grpc")
		return c
	}
	if c.Protocol == "" && u.Port() == portHTTP {
		c.Protocol = OverHTTP
	}
	c.Protocol = cmp.Or(c.Protocol, "grpc")
	if configured {
		return c
	}
	if ofTraces == "" && c.Protocol == OverHTTP {
		u = u.JoinPath("v1/traces") // the variable has the path of all signals
	}
	if u.Port() == "" {
		port := portGRPC
		if c.Protocol == OverHTTP {
			port = portHTTP
		}
		u.Host = net.JoinHostPort(u.Hostname(), port)
	}
	if u.Scheme == "https" {
		c.CAFile = cmp.Or(c.CAFile, env("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE"), env("OTEL_EXPORTER_OTLP_CERTIFICATE"))
	}
	c.Endpoint = u.String()
	return c
}
