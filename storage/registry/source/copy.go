package source

import (
	"context"

	"go.podman.io/image/v5/copy"
	"go.podman.io/image/v5/docker/reference"
	"go.podman.io/image/v5/signature"
	imagetransport "go.podman.io/image/v5/storage"
	"go.podman.io/image/v5/types"
	cstorage "go.podman.io/storage"
)

// Copy copies src into a store under name, and returns its id there. The caller has asked the
// signature policy about src.
func Copy(ctx context.Context, store cstorage.Store, name reference.Named, src types.ImageReference, sys *types.SystemContext, options copy.Options) (string, error) {
	return copyTo(ctx, store, name, "", src, sys, options)
}

// CopyUnnamed copies like Copy, with a given id and without a name.
func CopyUnnamed(ctx context.Context, store cstorage.Store, id string, src types.ImageReference, sys *types.SystemContext, options copy.Options) (string, error) {
	return copyTo(ctx, store, nil, id, src, sys, options)
}

func copyTo(ctx context.Context, store cstorage.Store, name reference.Named, id string, src types.ImageReference, sys *types.SystemContext, options copy.Options) (string, error) {
	policy, err := acceptAnything()
	if err != nil {
		return "", err
	}
	defer func() { _ = policy.Destroy() }()
	dest, err := imagetransport.Transport.NewStoreReference(store, name, id)
	if err != nil {
		return "", err
	}
	var stored types.ImageReference
	options.SourceCtx, options.DestinationCtx = sys, sys
	options.PreferGzipInstances = types.OptionalBoolFalse // chooses as inspect did, or finds no manifest
	options.ProgressInterval = 1                          // every read
	options.ReportResolvedReference = &stored
	if _, err := copy.Image(ctx, policy, dest, src, &options); err != nil {
		return "", err
	}
	_, record, err := imagetransport.ResolveReference(stored)
	if err != nil {
		return "", err
	}
	return record.ID, nil
}

// acceptAnything returns the policy for the copy of an inspected source: the signature policy has
// been asked before. The caller must Destroy it.
func acceptAnything() (*signature.PolicyContext, error) {
	return signature.NewPolicyContext(&signature.Policy{
		Default: signature.PolicyRequirements{signature.NewPRInsecureAcceptAnything()},
	})
}
